"""What-if: replays request traces against pools that do not exist."""
