"""The HTTP face: an aiohttp application over one EngineClient."""
