"""Parts that recipes are composed from, as package data."""
