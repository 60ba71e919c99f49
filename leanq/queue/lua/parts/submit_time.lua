-- The last eight bytes of a worker's reply say when its request was submitted (ms). A reply that also goes to
-- other requests gets their times.
local submit_time = {FIELD = '\172submitted_ms\207'}

-- Returns the reply with another time.
function submit_time.set(reply, ms)
  if string.sub(reply, -8 - #submit_time.FIELD, -9) ~= submit_time.FIELD then return reply end
  return string.sub(reply, 1, -9) .. struct.pack('>I8', ms)
end

-- Sets the time of a reply under a key, whose size is known.
function submit_time.set_at(key, bytes, ms)
  local place = bytes - 8 - #submit_time.FIELD
  if redis.call('GETRANGE', key, place, bytes - 9) == submit_time.FIELD then
    redis.call('SETRANGE', key, bytes - 8, struct.pack('>I8', ms))
  end
end
