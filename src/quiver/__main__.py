"""``python -m quiver``, where the script is not on the path."""

from quiver.cli.main import main

if __name__ == "__main__":
    main()
