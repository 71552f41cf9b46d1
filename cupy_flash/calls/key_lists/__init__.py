"""Calls whose queries attend to listed keys."""
