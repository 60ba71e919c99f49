-- parts: record
-- arguments: reply_ttl_ms
-- each call: publish.inboxes = {}
-- Each reply takes the place of its request's record. Its client's inbox is told, in one stream entry per
-- client and call. Of a large reply the inbox has only the size. The client fetches the reply by request
-- id, which costs less than a second copy. The first entry gives the inbox its time-to-live, and the client
-- extends it by reading.
-- A reply is a text or, if its worker has uploaded it, a table with its `key` and its `bytes`.
local publish = {}

function publish.send(client)
  local inbox, fields = tag .. ':inbox:' .. client, publish.inboxes[client]
  if not redis.call('XADD', inbox, 'NOMKSTREAM', '*', unpack(fields)) then
    redis.call('XADD', inbox, '*', unpack(fields))
    redis.call('PEXPIRE', inbox, reply_ttl_ms)
  end
  publish.inboxes[client] = nil
end

-- Returns an uploaded reply; nil if the server has none there.
function publish.uploaded(key)
  local bytes = redis.call('STRLEN', key)
  return bytes > 0 and {key = key, bytes = bytes, moves = true} or nil
end

function publish.size(reply) return type(reply) == 'table' and reply.bytes or #reply end

-- Returns the reply as an inbox has it: its text, or its size if it is large.
function publish.told(reply)
  if type(reply) == 'table' then return reply.bytes end
  return #reply <= LARGE_BYTES and reply or #reply
end

-- Writes a reply under a name. The first write moves an uploaded one there, and later writes copy it.
function publish.write(name, reply, ttl_ms)
  if type(reply) ~= 'table' then return redis.call('SET', name, reply, 'PX', ttl_ms) end
  if reply.moves then
    redis.call('RENAME', reply.key, name)
    reply.key, reply.moves = name, false
  else
    redis.call('COPY', reply.key, name, 'REPLACE')
  end
  redis.call('PEXPIRE', name, ttl_ms)
end

-- Notes a reply for one client, which is told when the call ends.
local function tell_one(request_id, client, reply)
  local fields = publish.inboxes[client]
  if not fields then fields = {}; publish.inboxes[client] = fields end
  fields[#fields + 1] = request_id
  fields[#fields + 1] = publish.told(reply)
  if #fields >= 4000 then publish.send(client) end
end

-- Notes a reply for its client or clients (see hand_over.lua).
function publish.tell(request_id, client, reply)
  if publish.inboxes[client] or not string.find(client, ' ', 1, true) then
    return tell_one(request_id, client, reply)
  end
  for name in string.gmatch(client, '%S+') do tell_one(request_id, name, reply) end
end

-- Writes the reply in the place of the record, and notes it for its client or clients.
function publish.reply(request_id, client, reply)
  publish.write(tag .. ':req:' .. request_id, reply, reply_ttl_ms)
  publish.tell(request_id, client, reply)
end

-- Returns whether the server has MSETEX (Valkey from 9.1, Redis from 8.4) and this user may call it. MSETEX
-- does the work of many SET at half of their cost.
local function has_msetex(key)
  local number, least = redis.VALKEY_VERSION_NUM, 0x090100
  if not number then number, least = redis.REDIS_VERSION_NUM or 0, 0x080400 end
  if number < least then return false end
  -- A server that stands in for either may lack the function or the command.
  local asked, allowed = pcall(function() return redis.acl_check_cmd('MSETEX', 1, key, '', 'PX', reply_ttl_ms) end)
  return asked and allowed
end

-- Writes texts of replies in the places of their records. `written`: each key, followed by its reply.
function publish.write_all(written)
  if #written > 2 and has_msetex(written[1]) then
    for i = 1, #written, 4000 do
      local part = {unpack(written, i, math.min(i + 3999, #written))}
      local n = #part
      part[n + 1], part[n + 2] = 'PX', reply_ttl_ms
      redis.call('MSETEX', n / 2, unpack(part))
    end
  else
    for i = 1, #written, 2 do redis.call('SET', written[i], written[i + 1], 'PX', reply_ttl_ms) end
  end
end

-- Ends a request, whose record is r, with a reply.
function publish.finish(request_id, r, reply)
  redis.call('HDEL', tag .. ':phase', request_id)
  if r.detached then redis.call('UNLINK', record.body_key(request_id)) end
  publish.reply(request_id, r.client, reply)
end

-- Returns a reply to the request r with a verdict that is not Lean's, in the wire format of version 1.
function publish.verdict(r, verdict, reason, attempts, queued_ms)
  return cmsgpack.pack({'', 1, {verdict = verdict, reason = reason, attempts = attempts,
    queued_s = queued_ms / 1000, content = r.digest ~= '' and r.digest .. ' ' .. r.environment or '',
    spent = {reply_ttl_ms, 0, 0, 0, false, r.lost}, submitted_ms = r.submitted}})
end

function publish.all()
  local clients = {}
  for client in pairs(publish.inboxes) do clients[#clients + 1] = client end
  for _, client in ipairs(clients) do publish.send(client) end
end
