package load

import "time"

// CPU is how one CPU spent its time, as /proc/stat has it: in ticks of 10 ms on most machines.
type CPU struct {
	User, Nice, System, IRQ, SoftIRQ, Steal time.Duration
	Idle                                    time.Duration // waiting for disks included
}

// Busy is all of the time that the CPU worked for this machine.
func (c CPU) Busy() time.Duration { return c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ }

// Process is the CPU time of one end, as getrusage has it: precise, and with those interrupts and softirqs in it that happened to come
// while the process ran.
type Process struct{ User, System time.Duration }

// Usage is the CPU time that went by inside the window of a sample.
type Usage struct {
	Window         time.Duration // as it came out, not as it was asked for
	CPUs           []CPU         // by number of the CPU
	Client, Server Process
}

// Machine is the sum of all CPUs.
func (u Usage) Machine() (sum CPU) {
	for _, c := range u.CPUs {
		sum.User += c.User
		sum.Nice += c.Nice
		sum.System += c.System
		sum.IRQ += c.IRQ
		sum.SoftIRQ += c.SoftIRQ
		sum.Steal += c.Steal
		sum.Idle += c.Idle
	}
	return sum
}
