"""Documents, and what generates some of them."""
