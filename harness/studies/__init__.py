"""Studies: points that are run one after another, and what their figures are held against."""
