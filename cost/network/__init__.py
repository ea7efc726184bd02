"""Networks: traffic of collectives over links, and models of their time."""
