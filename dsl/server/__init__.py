"""Language server for plans: editors' requests, answered by the functions behind the commands."""
