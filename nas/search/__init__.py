"""The search: what to try next, who goes on, and what is on the front."""
