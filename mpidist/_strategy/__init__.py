"""The classes that users see: strategies, their extended methods, replica contexts."""
