"""The small worlds in which a method can be tried in seconds."""
