"""An example of a package that adds a mixer and a recall task to nas."""
