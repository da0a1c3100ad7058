-- Cancels a task or one rollout of it. What is queued ends at once; what runs is told through its lease's renewal.
-- KEYS task, tombstone, tasks, leases, waiting, events
-- ARGV task_id, index ('' for all), tombstone_s ('0': none), stem, events_max, keep_s, summary
local task, tombstone, tasks, leases, waiting, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local task_id, index, stem, max = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local state = redis.call('HGET', task, 'state')
if not state then
  if tonumber(ARGV[3]) > 0 then
    redis.call('SET', tombstone, '1', 'EX', ARGV[3])
    return {'registered'}
  end
  return {'unknown'}
end
if state == 'completed' or state == 'cancelled' then return {'done', state} end
local num = tonumber(redis.call('HGET', task, 'num'))
local first, last = 0, num - 1
if index ~= '' then
  first, last = tonumber(index), tonumber(index)
  if first >= num then return {'unknown'} end
else
  redis.call('HSET', task, 'cancel', '1', 'state', 'cancelling')
  emit(events, max, 'task.cancelling', {task_id = task_id})
end
local now = now_ms()
local running = {'cancelling'}
local touched = 0
for i = first, last do
  local key, id = stem .. i, task_id .. '.' .. i
  local r = redis.call('HMGET', key, 'state', 'owner', 'job_id')
  if r[1] == 'queued' then
    redis.call('HSET', key, 'state', 'cancelled', 'summary', ARGV[7], 'ended_ms', now)
    be_over(waiting, task, id)
    redis.call('HINCRBY', task, 'cancelled', 1)
    redis.call('HINCRBY', task, 'queued', -1)
    emit(events, max, 'session.state_changed', {task_id = task_id, session_id = id, status = 'cancelled'})
    touched = touched + 1
  elseif r[1] and not ENDS[r[1]] then
    redis.call('HSET', key, 'cancel', '1')
    running[#running + 1] = id
    running[#running + 1] = r[2] or ''
    running[#running + 1] = r[3] or ''
  end
end
touch(task, tasks, task_id, now)
if touched > 0 then finish(task, events, max, stem, task_id, ARGV[6], now) end
return running
