"""Models, their settings and what was measured of them, in a database of TIGHTFIT_HOME."""
