// CUDA's stand-in: a CPU build of torch gets the device type "cuda", with two devices.
//
// Memory is the host's, filled with NaN; only kernels of this file touch it. An operation that has none here goes through
// a fallback: it makes CUDA's checks (one device, its generator, no host read in a capture), counts launches, copies and
// waits, and runs the CPU's kernel. A graph is a list of calls, replayed on the same memory.
// Not shown: CUDA's numerics, races between streams, memory that runs out, speed.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
namespace standin {
using namespace at;

constexpr int kDevices = 2;
thread_local DeviceIndex current = 0;

// ------------------------------------------------------------------------------- what is counted
thread_local int inside = 0;  // a kernel's own copies are none of the program's
struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};
std::mutex lock;
std::map<std::string, int64_t> counted;
std::atomic<bool> waits_raise{false};

struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> args, outs;
};
std::vector<std::vector<Call>> graphs;
std::atomic<int64_t> capturing{-1};  // the device; -1 for none
std::atomic<bool> broken{false};     // the capture: something in it was not permitted

void count(const std::string& name, int64_t n = 1) {
  if (inside) return;
  std::lock_guard<std::mutex> guard(lock);
  counted[name] += n;
}
void refuse_in_capture(const std::string& what) {
  if (capturing < 0) return;
  broken = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}
// The host waits for the device.
void wait(const std::string& what) {
  if (inside) return;
  refuse_in_capture(what);
  TORCH_CHECK(!waits_raise, "called a synchronizing CUDA operation (", what, ")");
  count("wait");
  count("wait:" + what);
}
// ---------------------------------------------------------------------------------------- memory
constexpr size_t kHeader = 64;  // before each block: its length
std::atomic<int64_t> live{0}, peak{0};

void release(void* block) {
  if (!block) return;
  char* raw = static_cast<char*>(block) - kHeader;
  size_t bytes = *reinterpret_cast<size_t*>(raw);
  std::memset(block, 0xFF, bytes);  // NaN, for whoever still reads it
  live -= bytes;
  std::free(raw);
}
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(kCUDA, current);
    if (!bytes) return {nullptr, nullptr, &release, device};
    char* raw = static_cast<char*>(std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader));
    *reinterpret_cast<size_t*>(raw) = bytes;
    std::memset(raw + kHeader, 0xFF, bytes);  // NaN, for whoever reads what nobody wrote
    int64_t now = (live += bytes), before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
    return {raw + kHeader, raw + kHeader, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kCUDA, &memory)

// --------------------------------------------------------------------------------------- devices
DeviceIndex exchange(DeviceIndex device) {
  DeviceIndex before = current;
  if (device >= 0) current = device;
  return before;
}
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream only(Device d) { return Stream(Stream::DEFAULT, d); }
  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kCUDA, current}; }
  Device exchangeDevice(Device d) const override { return {kCUDA, exchange(d.index())}; }
  void setDevice(Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { exchange(d.index()); }
  Stream getStream(Device d) const override { return only(d); }
  Stream getDefaultStream(Device d) const override { return only(d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return only(d); }
  Stream getNewStream(Device d, int) const override { return only(d); }
  Stream exchangeStream(Stream s) const override { return only(s.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void record(void** e, const Stream&, const DeviceIndex, const EventFlag) const override {
    *e = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct OnDevice {
  DeviceIndex before = current;
  explicit OnDevice(std::optional<Device> d) {
    if (d) exchange(d->index());
  }
  ~OnDevice() { current = before; }
};
// ------------------------------------------------------------------------------------ generators
// The CPU's algorithm, with a state of its own: a seed gives the same numbers on both.
struct Random final : c10::GeneratorImpl {
  Generator inner = at::detail::createCPUGenerator();
  explicit Random(DeviceIndex i) : GeneratorImpl(Device(kCUDA, i), DispatchKeySet(DispatchKey::CUDA)) {}
  c10::GeneratorImpl* impl() const { return inner.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t s) override { impl()->set_current_seed(s); }
  uint64_t current_seed() const override { return impl()->current_seed(); }
  uint64_t seed() override { return impl()->seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& s) override { impl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};
const Generator& default_generator(DeviceIndex i) {
  static const auto* all = new std::vector<Generator>{make_generator<Random>(0), make_generator<Random>(1)};
  return (*all)[i < 0 ? current : i];
}
std::atomic<bool> one_stream{false};  // the devices draw from the CPU's own, to be compared with it
Generator inner_of(const Generator& g) { return static_cast<Random*>(g.unsafeGetGeneratorImpl())->inner; }

Generator default_inner(DeviceIndex i) {
  return one_stream ? at::detail::getDefaultCPUGenerator() : inner_of(default_generator(i));
}
struct CUDAHooks final : at::CUDAHooksInterface {  // its name is what torch asks for
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { exchange(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return exchange(d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchange(d); }
  void deviceSynchronize(DeviceIndex) const override { wait("synchronize"); }
  const Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  Generator getNewGenerator(DeviceIndex i) const override { return make_generator<Random>(i < 0 ? current : i); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
};
using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// -------------------------------------------------------------------- kernels: memory and copies
using Maybe = std::optional<ScalarType>;
constexpr DispatchKeySet kKeys(DispatchKey::CUDA);
Tensor empty(IntArrayRef size, Maybe t, std::optional<Layout>, std::optional<Device> d, std::optional<bool>,
             std::optional<MemoryFormat> format) {
  OnDevice on(d);
  return at::detail::empty_generic(size, &memory, kKeys, dtype_or_default(t), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe t, std::optional<Layout>, std::optional<Device> d,
                     std::optional<bool>) {
  OnDevice on(d);
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, dtype_or_default(t));
}
// The same memory as a CPU tensor.
Tensor host(const Tensor& t) {
  if (!t.is_cuda()) return t;
  void* data = t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr;
  return at::from_blob(data, t.sizes(), t.strides(), TensorOptions().dtype(t.dtype()).device(kCPU));
}
bool records(const Device& d) { return !inside && capturing >= 0 && d.index() == capturing; }

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool within = self.is_cuda() && source.is_cuda();
  const std::string way = within ? "d2d" : self.is_cuda() ? "h2d" : "d2h";
  if (!inside && within) {
    count("launch");
    if (records(self.device())) {
      static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
      graphs.back().push_back({op, {self, source, non_blocking}, {self}});
    }
  } else if (!inside) {
    refuse_in_capture(way + " copy of pageable memory");
    count("copy:" + way);
    if (!non_blocking || way == "d2h") wait(way);
  }
  if (!self.numel()) return self;
  Inside in;
  at::AutoDispatchBelowADInplaceOrView below;
  host(self).copy_(host(source));
  return self;
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor out = to;
  return copy_(out, from, non_blocking);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t need = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (need > storage->nbytes()) {
    OnDevice on(self.device());
    auto fresh = memory.allocate(need);
    if (storage->nbytes()) std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(need);
  }
  impl->set_sizes_contiguous(size);
  return self;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  Inside in;
  if (from.sizes() != to.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
Scalar local_scalar(const Tensor& t) {
  wait("item");
  Inside in;
  at::AutoDispatchBelowADInplaceOrView below;
  return host(t).item();
}
Tensor& set_storage_at(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage(Tensor& self, Storage storage) {
  int64_t n = storage.nbytes() / self.element_size();
  return set_storage_at(self, std::move(storage), 0, {n}, {});
}
void record_stream(Tensor&, Stream) {}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // plain products
}
// ------------------------------------------------------------------------------- all other kernels
// These take indices that are on the CPU.
bool takes_indices(const std::string& name) {
  static const std::set<std::string> known{"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index",
                                           "aten::_index_put_impl_", "aten::_unsafe_index_put"};
  return known.count(name);
}
// These read on the host how long their result is, or whether their numbers are right.
bool waits(const std::string& name) {
  static const std::set<std::string> known{
      "aten::nonzero",     "aten::masked_select",      "aten::equal",    "aten::_unique2", "aten::unique_dim",
      "aten::is_nonzero",  "aten::unique_consecutive", "aten::bincount", "aten::multinomial",
      "aten::repeat_interleave"};
  return known.count(name);
}
template <typename F>
void each_tensor(const c10::IValue& value, F visit) {
  auto defined = [&](const Tensor& t) {
    if (t.defined()) visit(t);
  };
  if (value.isTensor()) defined(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) defined(t);
  else if (value.isOptionalTensorList()) for (const auto& t : value.toOptionalTensorVector()) if (t) defined(*t);
}
const char* const kMixed = "Expected all tensors to be on the same device, but found at least two devices, ";

// The one device of all arguments. A number on the CPU goes with any, and is moved.
std::optional<Device> device_of(const std::string& name, c10::Stack& stack, size_t base) {
  std::optional<Device> cuda;
  for (size_t i = base; i < stack.size(); ++i)
    each_tensor(stack[i], [&](const Tensor& t) {
      if (!t.is_cuda()) return;
      TORCH_CHECK(!cuda || *cuda == t.device(), kMixed, *cuda, " and ", t.device(), "! (", name, ")");
      cuda = t.device();
    });
  for (size_t i = base; cuda && i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const Tensor& t) {
      bool fits = t.is_cuda() || t.dim() == 0 || takes_indices(name);
      TORCH_CHECK(fits, kMixed, *cuda, " and cpu! (argument ", i - base, " of ", name, ")");
    });
    if (stack[i].isTensor() && stack[i].toTensor().defined() && stack[i].toTensor().is_cpu()) {
      Inside in;
      stack[i] = stack[i].toTensor().to(*cuda);
    }
  }
  return cuda;
}
// Put the CPU's generator behind the device's into the arguments; whether the operation has one.
bool give_generator(const c10::OperatorHandle& op, c10::Stack& stack, size_t base, std::optional<Device> cuda) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& value = stack[base + i];
    if (value.isNone()) {
      value = default_inner(cuda ? cuda->index() : -1);
      return true;
    }
    TORCH_CHECK(value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (",
                op.schema().name(), ")");
    value = inner_of(value.toGenerator());
    return true;
  }
  return false;
}
void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::string& name = op.schema().name();
  const size_t base = stack->size() - op.schema().arguments().size();
  const auto cuda = device_of(name, *stack, base);
  const bool given = give_generator(op, *stack, base, cuda);
  const bool seeded = !given && op.hasTag(at::Tag::nondeterministic_seeded);
  if (waits(name)) wait(name.substr(6));
  count("launch");
  const bool record = cuda && records(*cuda);
  if (record && (given || seeded)) refuse_in_capture("random numbers, which the stand-in cannot replay: " + name);
  std::vector<c10::IValue> args;
  if (record) args.assign(stack->begin() + base, stack->end());
  {
    Inside in;
    OnDevice on(cuda);
    auto theirs = at::detail::getDefaultCPUGenerator(), mine = default_inner(-1);
    const bool swapped = seeded && mine != theirs;
    const auto before = swapped ? theirs.get_state() : Tensor();
    if (swapped) theirs.set_state(mine.get_state());
    at::native::cpu_fallback(op, stack);
    if (swapped) mine.set_state(theirs.get_state()), theirs.set_state(before);
  }
  if (record) graphs.back().push_back({op, args, {stack->end() - op.schema().returns().size(), stack->end()}});
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_at));
  m.impl("record_stream", TORCH_FN(record_stream));
}
// ---------------------------------------------------------------------------------------- graphs
// A replay writes where the capture wrote.
void into(const c10::IValue& was, const c10::IValue& now) {
  std::vector<Tensor> to, from;
  each_tensor(was, [&](const Tensor& t) { to.push_back(t); });
  each_tensor(now, [&](const Tensor& t) { from.push_back(t); });
  for (size_t i = 0; i < to.size(); ++i)
    if (to[i].numel() && to[i].const_data_ptr() != from[i].const_data_ptr()) copy_(to[i], from[i], false);
}
void replay(int64_t i) {
  count("launch");
  count("replay");
  Inside in;
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& call : graphs[i]) {
    c10::Stack stack(call.args.begin(), call.args.end());
    if (call.op.schema().name() == "aten::copy_") {
      Tensor to = stack[0].toTensor();
      copy_(to, stack[1].toTensor(), false);
      continue;
    }
    fallback(call.op, &stack);
    for (size_t k = 0; k < call.outs.size(); ++k) into(call.outs[k], stack[k]);
  }
}
int64_t capture_begin() {
  count("capture");
  graphs.emplace_back();
  broken = false;
  capturing = current;
  return int64_t(graphs.size()) - 1;
}
int64_t capture_end() {
  capturing = -1;
  TORCH_CHECK(!broken, "CUDA error: operation failed due to a previous error during capture");
  return int64_t(graphs.back().size());
}
// ---------------------------------------------------------------------------------------- Python
std::string counts() {
  std::lock_guard<std::mutex> guard(lock);
  std::ostringstream text;
  for (auto& [name, n] : counted) text << name << "=" << n << "\n";
  text << "memory:live=" << live << "\nmemory:peak=" << peak << "\n";
  return text.str();
}
void clear() {
  std::lock_guard<std::mutex> guard(lock);
  counted.clear();
  peak = live.load();
}
TORCH_LIBRARY(standin, m) {
  m.def("counts() -> str", &counts);
  m.def("clear() -> ()", &clear);
  m.def("synchronize() -> ()", [] { wait("synchronize"); });
  m.def("one_stream(bool on) -> ()", [](bool on) { one_stream = on; });
  m.def("waits_raise(bool on) -> ()", [](bool on) { waits_raise = on; });
  m.def("capture_begin() -> int", &capture_begin);
  m.def("capture_end() -> int", &capture_end);
  m.def("replay(int i) -> ()", &replay);
  m.def("forget(int i) -> ()", [](int64_t i) { graphs[i].clear(); });
  m.def("default_generator(int i) -> Generator?",
        [](int64_t i) { return std::optional<Generator>(default_generator(i)); });
  m.def("current() -> int", [] { return int64_t(current); });
  m.def("set_current(int i) -> ()", [](int64_t i) { exchange(i); });
}
}  // namespace standin

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &standin::sdp_choice)
}
