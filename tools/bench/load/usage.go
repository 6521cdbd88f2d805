package load

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Usage is the CPU time that went by inside the window of a sample.
type Usage struct {
	Window time.Duration // as it came out, not as it was asked for
	// Kernel is the time that the machine's CPUs spent in the kernel: system calls, interrupts and softirqs; SoftIRQ is the part of the last two. Steps
	// of 10 ms: one short sample says little and the sum of many says much.
	Kernel, SoftIRQ time.Duration
	// Stolen is what the hypervisor took of each CPU.
	Stolen         []time.Duration
	Client, Server Process
	// broken says that the kernel's files were not as they should be.
	broken error
}

// Process is the CPU time of one end. Busy is precise, and includes the interrupts and softirqs that came while it ran, for it or not.
type Process struct {
	Busy    time.Duration
	Delayed time.Duration // ready to run, while something else had the CPU
}

// usage is that of a sample whose window one of the ends has measured.
func usage(counter, client, server *end) (u Usage) {
	u.Window = counter.last.at - counter.first.at
	before, err := parseStat(string(counter.first.stat))
	after, err2 := parseStat(string(counter.last.stat))
	if err == nil {
		err = err2
	}
	if err == nil && len(before) != len(after) {
		err = fmt.Errorf("compare CPU times: there were %d CPUs, now there are %d", len(before), len(after))
	}
	if u.broken = err; err == nil {
		for i, cpu := range after {
			u.Kernel += cpu.kernel - before[i].kernel
			u.SoftIRQ += cpu.softIRQ - before[i].softIRQ
			u.Stolen = append(u.Stolen, cpu.stolen-before[i].stolen)
		}
	}
	u.Client, u.Server = u.process(client), u.process(server)
	return u
}

func (u *Usage) process(e *end) (p Process) {
	p.Busy = time.Duration(e.last.usage.Utime.Nano() + e.last.usage.Stime.Nano() - e.first.usage.Utime.Nano() - e.first.usage.Stime.Nano())
	before, err := parseDelay(string(e.first.delays))
	after, err2 := parseDelay(string(e.last.delays))
	if u.broken == nil {
		if u.broken = err; err == nil {
			u.broken = err2
		}
	}
	p.Delayed = after - before
	return p
}

// cpu is how one CPU has spent its time since it came up.
type cpu struct{ kernel, softIRQ, stolen time.Duration }

// tick is the unit of /proc/stat: USER_HZ is 100 on every architecture that Go runs on.
const tick = 10 * time.Millisecond

// parseStat reads the lines of the single CPUs in /proc/stat: user nice system idle iowait irq softirq steal.
func parseStat(text string) (cpus []cpu, err error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "cpu" {
			continue
		}
		if !strings.HasPrefix(fields[0], "cpu") {
			break // the CPUs come first
		}
		if len(fields) < 9 {
			return nil, fmt.Errorf("parse /proc/stat: %q has fewer than 8 numbers", line)
		}
		var n [8]time.Duration
		for i := range n {
			ticks, err := strconv.ParseInt(fields[i+1], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("parse /proc/stat: %s: %w", fields[0], err)
			}
			n[i] = time.Duration(ticks) * tick
		}
		cpus = append(cpus, cpu{kernel: n[2] + n[5] + n[6], softIRQ: n[5] + n[6], stolen: n[7]})
	}
	if len(cpus) == 0 {
		return nil, fmt.Errorf("parse /proc/stat: no CPU in %.80q", text)
	}
	return cpus, nil
}

// parseDelay reads how long a thread was ready to run and did not, from its schedstat: time on the CPU, time waiting for it, turns.
func parseDelay(text string) (time.Duration, error) {
	fields := strings.Fields(text)
	if len(fields) != 3 {
		return 0, fmt.Errorf("parse /proc/thread-self/schedstat: %q has not three fields; the kernel needs CONFIG_SCHED_INFO", text)
	}
	ns, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("parse /proc/thread-self/schedstat: %w", err)
	}
	return time.Duration(ns), nil
}

// What a sample may be disturbed by, as shares of its window: an end that was ready to run waited for its CPU, or the hypervisor took the
// CPU away. One tick more of that: it is counted in ticks.
const (
	delayLimit = 20 // one in so many
	stealLimit = 50
)

// check refuses a sample during which something else used the CPUs of the two ends.
func (u Usage) check(what string, t Target) error {
	if u.broken != nil {
		return fmt.Errorf("%s: %w", what, u.broken)
	}
	for _, p := range []struct {
		name    string
		cpu     int
		process Process
	}{{"client", t.ClientCPU, u.Client}, {"server", t.ServerCPU, u.Server}} {
		if p.cpu < len(u.Stolen) && u.Stolen[p.cpu] > u.Window/stealLimit+tick {
			return fmt.Errorf("%w: %s: the hypervisor took CPU %d away for %s of %s", ErrStarved, what, p.cpu, u.Stolen[p.cpu], u.Window.Round(time.Millisecond))
		}
		// Where both share a CPU, each waits for the other.
		if t.ClientCPU != t.ServerCPU && p.process.Delayed > u.Window/delayLimit {
			return fmt.Errorf("%w: %s: the %s waited %s of %s for CPU %d", ErrStarved,
				what, p.name, p.process.Delayed.Round(time.Millisecond), u.Window.Round(time.Millisecond), p.cpu)
		}
	}
	return nil
}

// Delayed is the share of the window for which the end that waited more was ready to run, and did not.
func (u Usage) Delayed() float64 {
	if u.Window <= 0 {
		return 0
	}
	return max(u.Client.Delayed, u.Server.Delayed).Seconds() / u.Window.Seconds()
}
