"""Memory decided jointly: what recomputes, what stays unsharded, and what is offloaded."""
