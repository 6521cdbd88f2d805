package attach

import (
	"errors"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// BPF_LINK_TYPE_CGROUP and BPF_LINK_TYPE_TCX.
const (
	linkCgroup = 3
	linkTCX    = 11
)

// linkInfo is the beginning of struct bpf_link_info, for a tcx link.
type linkInfo struct {
	kind, id uint32
	program  ebpf.ProgramID
	_        uint32
	ifindex  uint32 // 0: the device is gone, or somebody has detached the link
	hook     uint32
}

// cgroup is, of a link on a cgroup, the inode of that: 64 bits in the place of the last two fields. 0: it is gone, or
// somebody has detached the link.
func (i linkInfo) cgroup() uint64 { return uint64(i.hook)<<32 | uint64(i.ifindex) }

// readLink asks for a pinned link. The error matches fs.ErrNotExist when nothing is pinned at path.
func readLink(path string) (linkInfo, error) {
	fd, err := openLinkFD(path)
	if err != nil {
		return linkInfo{}, err
	}
	info, err := askLink(fd)
	return info, errors.Join(err, unix.Close(fd))
}

// openLinkFD opens a pinned link. The error matches fs.ErrNotExist when nothing is pinned at path.
func openLinkFD(path string) (int, error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return 0, err
	}
	// The address is a pointer to Go's runtime too, so that it stays valid.
	open := struct {
		path      unsafe.Pointer
		fd, flags uint32
	}{path: unsafe.Pointer(name)}
	return bpf(unix.BPF_OBJ_GET, unsafe.Pointer(&open), unsafe.Sizeof(open))
}

// askLink asks for a link alone: package link asks for the whole of its program too.
func askLink(fd int) (info linkInfo, err error) {
	ask := struct {
		fd, size uint32
		info     unsafe.Pointer
	}{uint32(fd), uint32(unsafe.Sizeof(info)), unsafe.Pointer(&info)}
	_, err = bpf(unix.BPF_OBJ_GET_INFO_BY_FD, unsafe.Pointer(&ask), unsafe.Sizeof(ask))
	return info, err
}

func bpf(command int, attributes unsafe.Pointer, size uintptr) (int, error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(attributes), size)
	if errno != 0 {
		return 0, errno
	}
	return int(result), nil
}
