"""``make chaos``: kills real engines and a real pool service and damages their files."""
