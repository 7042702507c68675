"""What is measured beside this project's engine, behind the same door."""
