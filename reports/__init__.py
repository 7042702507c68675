"""Tables, figures and pages from run records."""
