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
  if stop(events, max, task, task_id, stem, i, ARGV[7], 'cancelled', now, running) then touched = touched + 1 end
end
touch(task, tasks, task_id, now)
if touched > 0 then finish(task, events, max, stem, task_id, ARGV[6], now) end
return running
