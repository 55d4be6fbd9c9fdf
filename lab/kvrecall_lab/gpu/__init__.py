"""A GPU machine without internet."""
