"""Models of every shape that people serve, each recalled from every tier."""
