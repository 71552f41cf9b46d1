"""From a call's arguments to what can be planned: array kinds, options, checks of contents."""
