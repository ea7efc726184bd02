"""Published training runs, stated as plans and compared with the simulator's predictions."""
