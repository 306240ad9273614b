"""What an operator looks at. Not part of the wheel."""
