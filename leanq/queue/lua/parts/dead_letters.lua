-- parts: clock record
-- Keeps the newest requests that took down too many workers, for people to look at.
local MAX_DEAD_LETTERS = 10000

-- A detached body moves to its letter, through Lua for once. The request id may come again, and its new end
-- must not remove this body.
local function bury(request_id, r, attempts, worker)
  local letter = tag .. ':deadreq:' .. request_id
  redis.call('HSET', letter, 'record', redis.call('GET', tag .. ':req:' .. request_id), 'n', attempts, 'w', worker)
  if r.detached then
    redis.call('HSET', letter, 'body', redis.call('GET', record.body_key(request_id)) or '')
    redis.call('UNLINK', record.body_key(request_id))
  end
  redis.call('ZADD', tag .. ':dead', now, request_id)
  local surplus = redis.call('ZCARD', tag .. ':dead') - MAX_DEAD_LETTERS
  if surplus > 0 then
    local oldest = redis.call('ZPOPMIN', tag .. ':dead', surplus)
    for i = 1, #oldest, 2 do redis.call('UNLINK', tag .. ':deadreq:' .. oldest[i]) end
  end
end
