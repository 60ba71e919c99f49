-- Identical requests, by their digests: one is leased, the leader, and others are attached to it,
-- its followers. :runs names the leader that takes more, by LANE:DIGEST, :with:LEADER has its
-- followers by age. A follower counts the attempt and shares its end; deadline and client are its own.
-- A leader whose client withdrew it runs on for them: it has its reply and no client ('').

local RUNS = P .. ':runs'
-- So many follow one leader, since they all end in one call. The next of their kind leads anew.
local FOLLOWERS = 1000
-- Copies of one reply for followers take up to so many bytes; the other followers run again.
local SHARED_BYTES = 16777216
-- How many followers this call has sent back.
local disbanded = 0
-- Leases of this call that are still to be written, by rid.
local pending = {}

local function run_of(lane, digest) return lane .. ':' .. digest end

local function place_of(rid) return pending[rid] or call('HGET', WHERE, rid) end

local function is_follower(rid, leader)
  return read_lease(place_of(leader)) and call('ZSCORE', P .. ':with:' .. leader, rid)
end

-- The rid whose record says what a run is: one that was withdrawn has its reply, and no record, but
-- its followers asked for the same.
local function one_like(rid, run)
  return run.client ~= '' and rid or call('ZRANGE', P .. ':with:' .. rid, 0, 0)[1] or rid
end

-- Whether the request follows the leader from now on. suspect: it may take down its worker, and so
-- follows only what runs alone: what others run beside proves nothing against it.
local function attach(rid, leader, digest, submitted, suspect)
  local run = leader and read_lease(place_of(leader))
  -- What is no such run was left behind by a server that lost keys, or by an older release.
  if not run or run.digest ~= digest or suspect and run.solo == '' then return false end
  local with = P .. ':with:' .. leader
  if call('ZCARD', with) >= FOLLOWERS then return false end
  call('ZADD', with, submitted, rid)
  call('HSET', WHERE, rid, attachment(leader, run.worker))
  return true
end

local function close_run(leader, lane, digest)
  local run = run_of(lane, digest)
  if call('HGET', RUNS, run) == leader then call('HDEL', RUNS, run) end
end

-- Takes a leased request away from its worker, which is told to stop it.
local function stop(rid, run)
  call('HDEL', WHERE, rid)
  call('ZREM', P .. ':work:' .. run.worker, rid)
  call('RPUSH', P .. ':stop:' .. run.worker, rid)
  if run.digest ~= '' then close_run(rid, run.lane, run.digest) end
end

-- A follower ends for itself. The last one takes a run with it that nobody else waits for.
local function detach(rid, leader)
  local with = P .. ':with:' .. leader
  call('ZREM', with, rid)
  local run = read_lease(call('HGET', WHERE, leader))
  if run and run.client == '' and call('ZCARD', with) == 0 then stop(leader, run) end
end

-- Ends the followers of a leader with its reply; returns how many.
local function share(leader, reply, max_attempts, now, ttl_ms, told)
  local with, shared = P .. ':with:' .. leader, 0
  local rids = call('ZRANGE', with, 0, -1)
  if #rids > 0 then call('UNLINK', with) end
  for _, rid in ipairs(rids) do
    local r = record(rid)
    if not r or read_attachment(call('HGET', WHERE, rid)) ~= leader then
      -- Somebody deleted it, and its client has sent it again.
    elseif is_late(r, now) then
      expire(rid, r, r[ATTEMPTS] + 1, now, ttl_ms, told, true)
    elseif shared > 0 and (shared + 1) * #reply > SHARED_BYTES then
      put_back(rid, false, max_attempts, now, ttl_ms, told)
    else
      finish(rid, r[CLIENT], reply, ttl_ms, told)
      shared = shared + 1
    end
  end
  return shared
end

-- What became of a request whose lease ended without a reply, as put_back; its followers fare
-- likewise. Their order is all the same, since they are.
local function requeue(rid, charge, max_attempts, now, ttl_ms, told, defer)
  local run = read_lease(call('HGET', WHERE, rid))
  local how = put_back(rid, charge, max_attempts, now, ttl_ms, told, defer)
  if run and run.digest ~= '' then
    close_run(rid, run.lane, run.digest)
    local with = P .. ':with:' .. rid
    for _, follower in ipairs(call('ZRANGE', with, 0, -1)) do
      if read_attachment(call('HGET', WHERE, follower)) == rid then
        put_back(follower, charge, max_attempts, now, ttl_ms, told, defer)
      end
      disbanded = disbanded + 1
    end
    call('UNLINK', with)
  end
  return how
end
