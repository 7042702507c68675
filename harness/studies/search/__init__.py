"""Points that Optuna proposes."""
