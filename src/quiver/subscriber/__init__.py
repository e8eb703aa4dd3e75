"""Subscribers: who reads what is stored, and how far each of them is."""
