"""The service's HTTP side: who may ask, and what is answered."""
