-- parts: clock record
-- Keeps the newest requests that took down too many workers, and the newest on which two kernels disagree, for
-- people to look at.
local MAX_DEAD_LETTERS = 10000
local MAX_DISAGREED = 1000

-- A detached body moves to its letter, through Lua for once. The request id may come again, and its new end
-- must not remove this body. `list`: dead or disagreed. `reply`: what the letter keeps of it, or nil.
local function bury(list, request_id, r, attempts, worker, reply)
  local letter, letters = tag .. ':deadreq:' .. request_id, tag .. ':' .. list
  redis.call('HSET', letter, 'record', redis.call('GET', tag .. ':req:' .. request_id), 'n', attempts, 'w', worker)
  if reply then redis.call('HSET', letter, 'reply', reply) end
  if r.detached then
    redis.call('HSET', letter, 'body', redis.call('GET', record.body_key(request_id)) or '')
    redis.call('UNLINK', record.body_key(request_id))
  end
  redis.call('ZADD', letters, now, request_id)
  local surplus = redis.call('ZCARD', letters) - (list == 'dead' and MAX_DEAD_LETTERS or MAX_DISAGREED)
  if surplus > 0 then
    local oldest = redis.call('ZPOPMIN', letters, surplus)
    for i = 1, #oldest, 2 do redis.call('UNLINK', tag .. ':deadreq:' .. oldest[i]) end
  end
end
