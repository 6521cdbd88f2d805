package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// rootDir is below a machine's directory where its root file system is put together.
const rootDir = "root"

// diskDir is below a machine's directory where what outlives a boot is kept; diskDirs are what it holds.
const diskDir = "disk"

var diskDirs = []string{"/var/lib/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/lib/rancher", "/etc/cni", "/opt/cni"}

// hostSysctls belong to the whole computer, and the kubelet insists on these values. It finds them, on files.
var hostSysctls = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0",
	"kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// furnish gives the machine its file systems: the real root with a layer in memory above, and of its own everything
// that tells about processes, networks and cgroups or that a node's programs write in bulk.
func furnish(config initConfig) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	all, err := hierarchies()
	if err != nil {
		return err
	}
	root, err := overlay(filepath.Join(config.Dir, rootDir))
	if err != nil {
		return err
	}
	f := furnisher{root: root}
	f.mount("proc", "/proc", "proc", 0, "")
	f.mount("sysfs", "/sys", "sysfs", 0, "")
	f.mount("", "/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	if !config.NoBPFFS {
		f.mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=0700")
	}
	f.cgroups(all)
	f.mount("/dev", "/dev", "", unix.MS_BIND|unix.MS_REC, "")
	for _, dir := range []string{"/run", "/tmp", "/var/lib/etcd", "/var/log"} {
		f.mkdir(dir)
		f.mount("tmpfs", dir, "tmpfs", 0, "mode=0755")
	}
	for _, dir := range diskDirs {
		f.disk(config.Dir, dir)
	}
	f.mkdir(config.ClusterDir)
	f.mount(config.ClusterDir, config.ClusterDir, "", unix.MS_BIND, "")
	f.guardSysctls(config)
	f.write("/etc/hostname", config.Name+"\n")
	hosts := "127.0.0.1 localhost\n"
	for _, addr := range config.Addrs {
		hosts += addr.String() + " " + config.Name + "\n"
	}
	f.write("/etc/hosts", hosts)
	f.write("/etc/resolv.conf", "nameserver 127.0.0.1\n")
	f.write("/etc/machine-id", fmt.Sprintf("%032x\n", config.Addrs[0].As16()))
	f.replace("/etc/containerd")
	if f.err != nil {
		return f.err
	}
	if err := enter(root); err != nil || !isUnified(all) {
		return err
	}
	return delegate()
}

// overlay puts a layer in memory above the real root.
func overlay(dir string) (string, error) {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
		return "", fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	upper, work, merged := filepath.Join(dir, "upper"), filepath.Join(dir, "work"), filepath.Join(dir, "merged")
	for _, d := range []string{upper, work, merged} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return "", err
		}
	}
	if err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work); err != nil {
		return "", fmt.Errorf("mount an overlay on %s: %w", merged, err)
	}
	return merged, nil
}

// enter makes dir the root of all.
func enter(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("make %s the root: %w", dir, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("let go of the real root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// Shared inside, or what the kubelet mounts never reaches a pod.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	return nil
}

// furnisher works below a root until the first error.
type furnisher struct {
	root string
	err  error
}

func (f *furnisher) mount(source, target, kind string, flags uintptr, data string) {
	if f.err != nil {
		return
	}
	if err := unix.Mount(source, f.root+target, kind, flags, data); err != nil {
		f.err = fmt.Errorf("mount %s on %s (%s %s): %w", source, target, kind, data, err)
	}
}

// cgroups mounts the hierarchies as the real machine has them; the roots are the machine's own.
func (f *furnisher) cgroups(all []hierarchy) {
	if !isUnified(all) {
		f.mount("tmpfs", cgroupRoot, "tmpfs", 0, "mode=0755")
	}
	for _, h := range all {
		if h.Dir != cgroupRoot {
			f.mkdir(h.Dir)
		}
		f.mount(h.Type, h.Dir, h.Type, 0, h.Data)
	}
}

func (f *furnisher) mkdir(dir string) {
	if f.err == nil {
		f.err = os.MkdirAll(f.root+dir, 0o755)
	}
}

// disk gives the machine a directory that outlives it, as long as the cluster.
func (f *furnisher) disk(machine, dir string) {
	source := filepath.Join(machine, diskDir, strings.ReplaceAll(dir, "/", "-"))
	if f.err == nil {
		f.err = os.MkdirAll(source, 0o755)
	}
	f.mkdir(dir)
	f.mount(source, dir, "", unix.MS_BIND, "")
}

// replace makes a directory empty, whatever the real machine has there.
func (f *furnisher) replace(dir string) {
	if f.err == nil {
		f.err = os.RemoveAll(f.root + dir)
	}
	f.mkdir(dir)
}

// write replaces a file; a symbolic link would lead out of the root.
func (f *furnisher) write(file, content string) {
	if f.err != nil {
		return
	}
	if err := os.Remove(f.root + file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.err = err
		return
	}
	f.err = os.WriteFile(f.root+file, []byte(content), 0o644)
}

// guardSysctls keeps the machine's programs from the settings that belong to the whole computer.
func (f *furnisher) guardSysctls(config initConfig) {
	for _, dir := range []string{"kernel", "vm", "fs"} {
		f.mount(f.root+"/proc/sys/"+dir, "/proc/sys/"+dir, "", unix.MS_BIND, "")
		f.mount("", "/proc/sys/"+dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	}
	for name, value := range hostSysctls {
		file := filepath.Join(config.Dir, rootDir, strings.ReplaceAll(name, "/", "."))
		if f.err == nil {
			f.err = os.WriteFile(file, []byte(value+"\n"), 0o644)
		}
		f.mount(file, "/proc/sys/"+name, "", unix.MS_BIND, "")
	}
}
