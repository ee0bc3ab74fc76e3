"""Tables and figures from run directories."""
