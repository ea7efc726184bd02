"""Published training runs, stated as plans and compared with what the simulator says of them."""
