// Package wire is what the runner on the host and the init in the virtual machine say to each other: a plan, which is a
// file in the machine, and frames, which come back line by line over a serial port of their own.
package wire

// Where things are in the virtual machine.
const (
	PlanFile = "/plan.json"
	// ModuleDir holds the modules, in a flat directory.
	ModuleDir = "/modules"
	// Root stands for the root of the checkout: the packages' directories with their test data are below it.
	Root = "/src"
	// BinDir holds the product's binaries.
	BinDir = Root + "/bin"
	// Port carries the frames; the first serial port is the kernel's console.
	Port = "/dev/ttyS1"
)

// Plan is what the machine has to do.
type Plan struct {
	// Modules are file names in ModuleDir, each after those that it needs.
	Modules []string
	Suites  []Suite
	// Env is the environment of the suites.
	Env []string
}

// Suite is one test binary: of the package in directory Root/Dir, and named Root/Dir/Binary.
type Suite struct {
	Dir, Binary string
	Args        []string
	// Seconds after which the binary is killed.
	Seconds int
	// Fetch is a glob of files in Dir to send back afterwards.
	Fetch string
}

// Frame is one line from the machine. Exactly one field is set.
type Frame struct {
	// Booted: the machine is ready; the kernel's release.
	Booted string `json:",omitempty"`
	// Line of output of the suite that runs.
	Line *string `json:",omitempty"`
	// File that the suite has left, by its path below Root.
	File *File `json:",omitempty"`
	// Ended: how the suite that ran has ended.
	Ended *Ended `json:",omitempty"`
	// Broken: the machine could not do its work.
	Broken string `json:",omitempty"`
	// Done: all suites have run.
	Done bool `json:",omitempty"`
}

// File is a file's content.
type File struct {
	Path    string
	Content []byte
}

// Ended is how a suite has ended.
type Ended struct {
	Dir     string
	Status  int // -1: killed, for the reason in Error
	Seconds float64
	Error   string `json:",omitempty"`
}
