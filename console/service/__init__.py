"""systemd units of servers and of the console: written, removed, started, shown."""
