"""One module per paper; see `nbkit.methods.ams`."""
