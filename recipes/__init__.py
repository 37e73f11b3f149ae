"""The shipped recipes, as package data."""
