"""What a worker does: requests sent, times taken, figures made."""
