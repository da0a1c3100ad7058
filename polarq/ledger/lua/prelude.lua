-- In front of every script: server time, events, and the change of a rollout's state by the transition table.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function emit(stream, max, kind, data)
  redis.call('XADD', stream, 'MAXLEN', '~', max, '*', 'type', kind, 'data', cjson.encode(data))
end

-- The indexes of what waits and what is held, of all and of each run, change together and only here. `index` is the
-- name of any shared key: the others lie beside it.
local function beside(index, name)
  return string.match(index, '^(.*:)[^:]*$') .. name
end

-- Bytes that Redis uses, and how many it may: `budget` is bytes, up to 1 a share of maxmemory, and '' all of maxmemory.
-- 0: no limit, or a server that does not say. Where payloads or queues have a Redis of their own, of which workers tell,
-- this is of the fullest.
local function memory_use(budget, index)
  local info = redis.pcall('INFO', 'memory')
  local used, wanted = 0, 0
  if type(info) == 'string' then
    used = tonumber(string.match(info, 'used_memory:(%d+)') or 0)
    local most = tonumber(string.match(info, 'maxmemory:(%d+)') or 0)
    wanted = tonumber(budget) or 1
    if wanted <= 1 then wanted = most * wanted elseif most > 0 then wanted = math.min(wanted, most) end
  end
  for _, server in ipairs({'payloads', 'queues'}) do
    local told = redis.call('GET', beside(index, 'memory-at:' .. server))
    if told then
      local there, may_use = string.match(told, '(%d+) (%d+)')
      if wanted == 0 or there / may_use > used / wanted then used, wanted = tonumber(there), tonumber(may_use) end
    end
  end
  return used, math.floor(wanted)
end

local function leave(index, run, id)
  local own = beside(index, 'run-waiting:' .. run)
  redis.call('ZREM', beside(index, 'waiting'), id)
  redis.call('ZREM', own, id)
  if redis.call('EXISTS', own) == 0 then redis.call('SREM', beside(index, 'runs-waiting'), run) end
  redis.call('ZREM', beside(index, 'leases'), id)
  own = beside(index, 'run-held:' .. run)
  redis.call('SREM', own, id)
  if redis.call('EXISTS', own) == 0 then redis.call('SREM', beside(index, 'runs-held'), run) end
end

-- What waits longer goes first; its task's priority is worth so many milliseconds of waiting. What was begun and given
-- back or lost stands where it stood: its time in line counts from its task's beginning.
local function wait_in_line(index, task, id, now)
  local t = redis.call('HMGET', task, 'run_id', 'head_ms', 'created_ms')
  leave(index, t[1], id)
  redis.call('ZADD', beside(index, 'waiting'), now, id)
  redis.call('ZADD', beside(index, 'run-waiting:' .. t[1]), tonumber(t[3] or now) - tonumber(t[2] or 0), id)
  redis.call('SADD', beside(index, 'runs-waiting'), t[1])
end

local function be_held(index, task, id, until_ms)
  local run = redis.call('HGET', task, 'run_id')
  leave(index, run, id)
  redis.call('ZADD', beside(index, 'leases'), until_ms, id)
  redis.call('SADD', beside(index, 'run-held:' .. run), id)
  redis.call('SADD', beside(index, 'runs-held'), run)
end

local function be_over(index, task, id)
  leave(index, redis.call('HGET', task, 'run_id'), id)
end

-- A rollout of which no record is left, so that its run is not known: out of the indexes of every run that is in one.
local function forget(index, id)
  redis.call('ZREM', beside(index, 'waiting'), id)
  redis.call('ZREM', beside(index, 'leases'), id)
  for _, run in ipairs(redis.call('SUNION', beside(index, 'runs-waiting'), beside(index, 'runs-held'))) do
    leave(index, run, id)
  end
end

local function may(before, after)
  return MAY[before] ~= nil and MAY[before][after] == true
end

local function ended(task)
  local c = redis.call('HMGET', task, 'completed', 'failed', 'timed_out', 'cancelled')
  return tonumber(c[1] or 0) + tonumber(c[2] or 0) + tonumber(c[3] or 0) + tonumber(c[4] or 0)
end

-- Keeps `member` in a sorted set for `keep_s` from now on (nil: until that is said), and the set as long as its last.
local function keep_until(key, member, now, keep_s)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  redis.call('ZADD', key, keep_s and now + keep_s * 1000 or 'inf', member)
  local open = redis.call('ZCOUNT', key, 'inf', 'inf') > 0
  if open then redis.call('PERSIST', key) else redis.call('EXPIRE', key, keep_s) end
end

-- A run's tasks and the runs are remembered as long as their results. `keep_s` nil: the task has not ended.
local function remember(index, run, task_id, now, keep_s)
  local own, known = beside(index, 'run-tasks:' .. run), beside(index, 'runs-known')
  keep_until(own, task_id, now, keep_s)
  if not keep_s or redis.call('ZCOUNT', own, 'inf', 'inf') == 0 then keep_until(known, run, now, keep_s) end
end

local function touch(task, tasks, task_id, now)
  redis.call('HSET', task, 'updated_ms', now)
  redis.call('ZADD', tasks, now, task_id)
end

-- The session secret of an attempt that is over opens nothing any more. An hour on, nobody asks for it.
local function shut(index, rollout)
  local digest = redis.call('HGET', rollout, 'grant')
  if not digest then return end
  local grant = beside(index, 'grant:' .. digest)
  if redis.call('HGET', grant, 'state') == 'open' then
    redis.call('HSET', grant, 'state', 'closed')
    redis.call('PEXPIRE', grant, 3600000)
  end
  redis.call('HDEL', rollout, 'grant')
end

-- Stops rollout `i` of a task: what waits ends at once with `summary`, what runs is flagged, and who runs it is added to
-- `running`. Returns whether it ended.
local function stop(events, max, task, task_id, stem, i, summary, why, now, running)
  local key, id = stem .. i, task_id .. '.' .. i
  local r = redis.call('HMGET', key, 'state', 'owner', 'job_id')
  if r[1] == 'queued' then
    redis.call('HSET', key, 'state', 'cancelled', 'summary', summary, 'ended_ms', now)
    be_over(events, task, id)
    redis.call('HINCRBY', task, 'cancelled', 1)
    redis.call('HINCRBY', task, 'queued', -1)
    emit(events, max, 'session.state_changed', {task_id = task_id, session_id = id, status = 'cancelled', reason = why})
    return true
  end
  if r[1] and not ENDS[r[1]] then
    redis.call('HSET', key, 'cancel', '1')
    -- A cancel that somebody asked for stays one.
    redis.call('HSETNX', key, 'why', why)
    running[#running + 1] = id
    running[#running + 1] = r[2] or ''
    running[#running + 1] = r[3] or ''
  end
  return false
end

-- The last end of a rollout ends its task. Returns 1 when this call did it.
local function finish(task, events, max, stem, task_id, keep_s, now)
  local num = tonumber(redis.call('HGET', task, 'num'))
  local done = ended(task)
  if done < num then
    emit(events, max, 'task.updated', {task_id = task_id, completed_sessions = done, total_sessions = num})
    return 0
  end
  local state = 'completed'
  if redis.call('HGET', task, 'cancel') == '1' then state = 'cancelled' end
  redis.call('HSET', task, 'state', state, 'ended_ms', now)
  redis.call('EXPIRE', task, keep_s)
  remember(events, redis.call('HGET', task, 'run_id'), task_id, now, tonumber(keep_s))
  -- Whoever ended it tells Celery and the callback; should that one die first, the reaper finds it here.
  redis.call('ZADD', beside(events, 'untold'), now + 10000, task_id)
  for i = 0, num - 1 do redis.call('EXPIRE', stem .. i, keep_s) end
  emit(events, max, 'task.completed', {task_id = task_id, status = state, completed_sessions = done, total_sessions = num})
  return 1
end
