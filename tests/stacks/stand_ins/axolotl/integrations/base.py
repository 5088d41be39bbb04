"""The interface of plugins, as far as Crosspack's plugin uses it."""


class BasePlugin:
    def __init__(self):
        pass

    def register(self, cfg):
        pass

    def get_input_args(self):
        pass

    def get_trainer_cls(self, cfg):
        pass

    def post_trainer_create(self, cfg, trainer):
        pass

    def get_training_args(self, cfg):
        pass


class PluginManager:
    _instance = None

    def __init__(self):
        self.plugins = {}

    @staticmethod
    def get_instance():
        if PluginManager._instance is None:
            PluginManager._instance = PluginManager()
        return PluginManager._instance
