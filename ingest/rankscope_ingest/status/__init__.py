"""How the service, its runs and its targets stand: gathered, as JSON, and as the page for people."""
