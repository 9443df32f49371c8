"""What the commands share: arguments, exit codes, tables, and what `kog generate` shows."""
