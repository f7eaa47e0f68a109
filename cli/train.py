"""Commands are registered here."""
