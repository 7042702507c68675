"""The page of the console: what a person with a browser sees and presses."""
