"""A registry of models, their settings and tests, and a page that shows and controls them."""
