#!lua flags=allow-oom
-- parts: replay
-- replay_drop: removes a replay memory with all its entries, and the value beside it.
for _, kind in ipairs({'about', 'log', 'slots', 'classes', 'index', 'places', 'value'}) do
  redis.call('UNLINK', replay.key(kind))
end
redis.call('ZREM', tag .. ':replay:names', name)
