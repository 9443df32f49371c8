"""What every backend must do alike, asked of each through the Backend protocol."""
