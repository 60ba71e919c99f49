-- parts: replay samples
-- Takes the oldest entries out of a memory's log.
local replay_log = {MOST_AT_ONCE = 128}

-- Takes out at least `count`, and more while they have more than `max_bytes`. Returns how many it took.
function replay_log.evict(about, count, max_bytes)
  local log, evicted, chunk = replay.key('log'), 0, math.max(count, 1)
  while evicted < count or about.bytes > max_bytes do
    local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', math.min(chunk, replay_log.MOST_AT_ONCE))
    local out = 0
    for _, entry in ipairs(oldest) do
      if evicted + out >= count and about.bytes <= max_bytes then break end
      out = out + 1
      about.bytes = about.bytes - #entry[2][2]
      if about.weighted and not about.reservoir then samples.remove((string.match(entry[1], '%d+'))) end
    end
    if out == 0 then
      about.bytes = 0
      break
    end
    redis.call('XTRIM', log, 'MAXLEN', '=', redis.call('XLEN', log) - out)
    evicted, chunk = evicted + out, chunk * 2
  end
  about.evicted = about.evicted + evicted
  return evicted
end
