"""Networks: what collectives move over which links, and models of their time."""
